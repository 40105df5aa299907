"""Arguments of jobs, of which some are words of a recipe."""

from dataclasses import fields

from milvus_hubness import Copy, Recipe

WORDS = frozenset(field.name for field in fields(Recipe))


def as_recipe(bank=None, **options):
    """Return the arguments of a job: a recipe of the bank and of those options that are its words, and
    the others as they are.
    """
    words = {name: options.pop(name) for name in WORDS & set(options)}
    return {"recipe": Recipe(bank, **words), **options}


def as_plan(bank=None, body=Copy, **options):
    """Return the arguments of a plan: a recipe and a body of those options that are their words, and the
    others as they are.
    """
    words = {field.name for field in fields(body)} & set(options)
    chosen = body(**{name: options.pop(name) for name in words})
    return as_recipe(bank, body=chosen, **options)
