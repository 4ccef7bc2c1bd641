"""The GPU worker process: a pure queue machine, the transfers and the execution of stages."""
