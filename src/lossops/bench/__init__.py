"""`python -m lossops.bench`: the losses checked against float64 and timed against their peers.

A loss is bound by memory, so its time is held against the least that the device could need:

    forward floor = bytes that must be read / read bandwidth
    step floor    = bytes that must be read, and those of the gradient / copy bandwidth

that is, each input read once and the gradient written once. `cases.Data.bytes_read` counts.

Both bandwidths are measured in the same run, and so is every peer: absolute times do not carry
over from one machine, or one day, to the next.

    cases.py   what is measured: losses, shapes, data, peers, bytes
    meter.py   how time is taken
    run.py     the checks against float64 and the four kinds of measurement
    report.py  the numbers, as JSON and as a table
    plot.py    the picture of them
    files.py   what the files of all runs share
    page.py    what all pictures share
    drawn/     calls drawn at random instead: `--random`, `--spec`
    heads/     heads instead of losses: `--heads`
    compiled/  compiled steps, with torch's loss and with ours: `--compiled`
    cli.py     the command line
"""
