"""After a run: is the model better, try it, take it along in fewer bits."""
