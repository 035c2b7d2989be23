"""Certificates for the hosts of a job; docs/security.md describes the protection they give.

>>> import tempfile
>>> from monarch.security import make_certificates
>>> client, worker = make_certificates(tempfile.mkdtemp(), ["client", "worker1.example.org"])
>>> sorted(worker.environment)
['HYPERACTOR_TLS_CA', 'HYPERACTOR_TLS_CERT', 'HYPERACTOR_TLS_KEY']
"""

from monarch._engine.launch.certificates import Certificate, make_certificates

__all__ = ["Certificate", "make_certificates"]
