"""Private training: DP-SGD (Abadi et al. 2016, "Deep Learning with Differential Privacy").

Each step samples every row with probability q on its own, clips the gradient of each row to the norm C, sums
the gradients over rows and ranks, and adds Gaussian noise of standard deviation sigma * C to the sum. The
modules `poisson_reader`, `row_gradients`, `secret_noise` and `ledger` do one of these parts each.
"""
