"""What tests of gtp, and of other implementers of its protocol, are made of."""
