"""How fast and how small, against a plain implementation and bare inference, in one process."""
