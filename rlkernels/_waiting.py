"""Threads that wait sleep after a short spin. To be imported before torch: OpenMP reads it when torch loads it.

Threads that spin, as those of libgomp do by default, keep others from the cores; where other programs run too, among
them those that they wait for.
"""

import os

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
if not any(name in os.environ for name in CHOICES):  # what the user chose stays
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}  # the count: libgomp's, a few microseconds
