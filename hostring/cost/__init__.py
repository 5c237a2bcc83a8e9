"""What a schedule costs on a network of hosts and links: by formula, or by running it on a model of them.

May import: `hostring.engine` (frame sizes), `hostring.topologies`, `hostring.arrays`.
"""
