"""Hosts that are the nodes of a SkyPilot cluster: `SkyPilotJob`.

The parts:

* `sky`: the requests to SkyPilot, whose errors become errors of one line;
* `guard`: tears the cluster down with the script, as long as no other script can find the job;
* `leftover`: whether the directory of a job is still needed, for ``monarch gc``;
* `job`: the job itself.

Only `sky` and `guard` import SkyPilot, when they first need it. A node needs pymonarch alone.
"""
