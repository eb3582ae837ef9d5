"""What lies on disk: the homework's files, how they are cut, drawn, summarised and compared; test cases."""
