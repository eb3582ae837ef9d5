"""Scripts of the checkout that write records of measurements, and tables and pictures of them."""
