"""farthing beside its peers: what each contestant is given, how it is run, what is measured of it.
See ../compare.py.
"""
