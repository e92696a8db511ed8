"""digits: a Flower app that learns handwritten digits without a server."""
