"""RPCs: one file for each service, and the code that all services share (`method`, `pages`, `admission`, `health`).

A method reads its request, hands an event to the lead, and turns the answer into a reply. It decides nothing.
"""
