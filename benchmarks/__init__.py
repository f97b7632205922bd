"""What jact's policies cost and save, measured over one table of models.

Run `python -m benchmarks --help`.
"""
