"""Inference engines: the embedded torch engine, SGLang servers, and a scripted one for tests."""
