"""How much each tenant used: accounts of requests, the ledger on disk, and tenants' rates.

Prices belong in `config.prices`, who a tenant is in `config.tenants`.
Begin with `accounts`.
"""
