"""The correction: banks, estimators, kernels, codecs and re-ranking. It knows no database."""
