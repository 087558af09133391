"""Tokens of issuers (OpenID Connect) as credentials: keys that verify them, and rules from groups to roles."""
