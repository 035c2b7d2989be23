"""Export to a collector of OpenTelemetry: metrics, traces and logs, as protobuf over HTTP.

The environment of a process switches it on, with the variables that OpenTelemetry documents
(`options`): in the script and, as processes inherit the environment, in all processes of its
meshes. It needs ``pip install 'pymonarch[otlp]'`` and nothing in the program.

- `options`: the environment in, destinations out. Pure.
- `totals`: points of intervals in, the sums that a collector expects out. Pure.
- `messages`: points and rows in, protobuf messages out. Pure.
- `sender`: requests, and the pauses between them while the collector does not answer.
- `exporter`: the thread that feeds the sender, and its bounded queues.
- `switch`: where a process begins and ends to export.

The messages are made with the official protobuf classes (``opentelemetry-proto``). Rejected: the
SDK of OpenTelemetry. Its instruments cost fifty times ours, so it would only see finished points,
spans and log records, through classes whose shapes change between its releases; its exporters log
every failure, through the logging of the program that they are to leave alone.
"""
