"""Local SGD and DiLoCo: ranks step locally and synchronize every few steps; one file per strategy."""
