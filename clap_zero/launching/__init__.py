"""What stands between a launcher and the ranks: hostfiles, what travels to other hosts, the guard.

Stdlib only: it runs before torch is imported, and in the `deepspeed` program itself.
"""
