"""Files that an operator or a row names. Sizes are
read from headers before memory is taken for them.
"""
