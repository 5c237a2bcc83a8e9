"""What clients of the head rank see: routes, fields of requests, answers and streams."""
