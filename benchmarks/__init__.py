"""Benchmarks: one script per question, run by `make bench`.

    make bench                        everything; the report lies in benchmarks/results/<date>-<cpu>/report.md
    make bench ONLY="w1 streams"      some of it
    make bench QUICK=1                everything, short: shows that it works, not how fast it is

Each script also runs by itself (`python -m benchmarks.engine_run --help`) and then prints one line of JSON. What two
programs are compared by is measured in pairs that alternate (A B B A …), because a machine drifts: `pairs`.
"""
