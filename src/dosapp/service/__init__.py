"""A learner over HTTP that keeps learning: predictions, sessions, versions and rollback.

service.py    LearningService (one writer and one reader on a folder) and Replica (reads only)
reader.py     answers requests in batches, each from one published version
writer.py     the one thread that changes weights: sessions, the stream, rollbacks
guards.py     when the writer does not trust its stream
uploads.py    request bodies → images;  tokens.py, audit.py   who may do what, and who did
http/         the FastAPI app;  client.py   the same from Python
server.py     from a folder to a port;  fleet.py   one writer and many readers on Ray
"""
