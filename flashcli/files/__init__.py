"""Files on disk: the homework's format, how files are cut, drawn, summarised and compared; test cases."""
