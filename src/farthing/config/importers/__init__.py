"""Jobs of other tools as jobs of ours: a table of keys for each tool, and readers of their files.

Nothing that is read is ever executed. Every key of a source is mapped or named; none is passed over
in silence.
"""
