"""Calls drawn at random, so that nobody tunes to a list: `--random SEED`; `--spec` for one call.

A call has a *kind* ("elements" or "rows") and a *family* (a layout, or what is asked of the rows).
Its text names everything that it needs, so that it can be run again on any machine.

    spec.py       a drawn call as text, and text as a call
    elements.py   calls of elementwise losses: their draws, operands, bytes and checks
    rows.py       calls of losses of rows: their draws, tensors and bytes
    jobs.py       what is to be checked and timed of a call
    exact.py      what calls of rows must return, by float64
    peers.py      who else computes rows, and which calls a peer does not take
    measure.py    checks and times a call beside its peers
    cli.py        the options, and a run
    tables.py     percentiles, the worst passes, and those in which a peer is ahead
"""
