"""Arrays of other libraries, computed where they lie."""
