"""Distillation: a network also imitates the outputs of a fitted model, its teacher.

Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network". The teacher transforms the rows
once, while `fit` writes them, so a step costs as much as without a teacher.
"""
