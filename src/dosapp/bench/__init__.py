"""Benchmark of DoSAPP against a plain implementation and bare inference, in one process."""
