"""What stands between a launcher and the ranks: hostfiles, variables and arguments for other hosts, the guard of `deepspeed`.

Stdlib only: it runs before torch is imported, and in the `deepspeed` program itself.
"""
