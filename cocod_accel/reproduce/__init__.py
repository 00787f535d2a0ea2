"""``cocod reproduce``: section 5 of the paper, cell by cell."""
