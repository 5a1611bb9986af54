"""Experts spread over ranks: who they are, how they agree, and how tokens reach the experts of others."""
