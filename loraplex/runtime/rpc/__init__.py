"""Parts that every gRPC process shares: errors and their statuses, server start, health, drain."""
