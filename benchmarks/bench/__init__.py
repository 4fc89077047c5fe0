"""One attention call beside its peers: shapes, our rows, peers, timing, passes, results, report and plot.

`python3 run.py bench` and `python benchmarks/whole_call.py` both end in `command.main`. `results`, `report` and `plot`
need no torch, so an earlier run's JSON can be read anywhere.
"""
