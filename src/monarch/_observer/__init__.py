"""The observer: a process beside the script that keeps telemetry, and shows the job by HTTP.

The script starts it when telemetry or the admin API is on (`handle`), and the observer (`main`)
ends with the script. All that costs time or memory is here: the store, SQL, HTTP. So a query that
never ends, a full disk or a hostile client harm the observer at most, and a killed observer is
started again.
"""
