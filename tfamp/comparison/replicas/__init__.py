"""`scaling`: what more replicas bring, and where their time goes."""
