"""Arguments of jobs, of which some are words of a recipe."""

from dataclasses import fields

from milvus_hubness import Recipe

WORDS = frozenset(field.name for field in fields(Recipe))


def as_recipe(bank=None, **options):
    """Return the arguments of a job: a recipe of the bank and of those options that are its words, and
    the others as they are.
    """
    words = {name: options.pop(name) for name in WORDS & set(options)}
    return {"recipe": Recipe(bank, **words), **options}
