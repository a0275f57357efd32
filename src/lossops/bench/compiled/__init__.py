"""Compiled steps: `python -m lossops.bench --compiled`.

A model that ends in a linear layer is compiled twice: with torch's loss, which the compiler looks
into, and with the loss of lossops, which is one operator to it. The steps take turns. Ours should
take no more memory, and at most 1.01 of the time.

    problems.py  shapes, data, what stands between the layer and the loss, results in float64
    measure.py   checks, times and peaks of memory
    plot.py      the picture of them
    cli.py       the command line, the tables
"""
