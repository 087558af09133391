"""Answers of a cluster that nothing disturbs, with the hash model: any wrong token would show."""
