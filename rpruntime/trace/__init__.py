"""Traces of real runs: what every device, copy and process did and when, on one clock.

spans      what is recorded, and the log in which workers and the optimizer note it
place      where a file can be written
recording  the controller's side: collects, stops, writes
chrome     the file, for chrome://tracing and Perfetto
waits      why a device did not compute
report     the bubbles of the real run beside the simulator's
"""
