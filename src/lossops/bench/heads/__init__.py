"""Heads: `python -m lossops.bench --heads`.

A head is bound by its matrix products, so its time is held against the same products by themselves:
`torch.mm` out of place, of the same operands, in turns with the heads.

    step     three products: the logits, the gradients of the input and of the weight
    frozen   two: the weight needs no gradient
    forward  one: nothing needs a gradient

    problems.py  shapes, data, contenders, results in float64
    measure.py   checks, times, peaks of memory, and which kernels a step spends its time in
    plot.py      the picture of them
    cli.py       the command line, the tables
"""
