"""What `hostring demo` and `hostring generate` run and show."""
