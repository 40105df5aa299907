"""Query-adaptive retrieval (QuARI): a network that adapts frozen embeddings of the gallery to each
query, learned from labelled pairs (Xing, Stylianou, Pless and Jacobs, 2025)."""
