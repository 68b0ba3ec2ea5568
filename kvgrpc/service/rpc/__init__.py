"""RPCs: one file a service, and what all of them share (`method`, `pages`, `admission`, `health`).

A method reads its request, hands an event to the lead and turns the answer into a reply; it decides nothing.
"""
