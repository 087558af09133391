"""The worker's ends of the relay streams that carry tokens to the routers."""


class NotARouterError(Exception):
    """The other end of a link has not proved that it is a router."""
