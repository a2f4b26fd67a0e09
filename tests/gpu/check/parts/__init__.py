"""The parts of the GPU check, one file per part."""
