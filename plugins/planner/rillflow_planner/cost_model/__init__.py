"""Cost model: seconds and bytes of every stage, each term a function with its formula."""
