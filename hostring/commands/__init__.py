"""The commands of `hostring`, one module per group; each adds its own to the app."""
