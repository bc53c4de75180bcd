# SPDX-License-Identifier: Apache-2.0
"""Capabilities of a multimodal language model, by which instruction data is classified and sampled.

The names follow the classes in which the paper groups its data: the categories of appendix B.1 and B.2, the ablation in
appendix C.2 (video, captions, OCR, GUI, math, knowledge, grounding, general VQA), and the text data of B.3. A pipeline may
name its own.
"""

TAXONOMY = {
    "caption": "describing an image or its parts, briefly or in detail",
    "ocr": "reading or locating text in documents, scenes, handwriting and formulas",
    "table_chart": "recognising, converting or answering questions about tables and charts",
    "grounding": "finding, pointing to or describing regions, with boxes or points",
    "counting": "counting objects",
    "gui": "reading, locating, explaining or operating elements of a user interface",
    "math": "mathematical problems, geometry and functions",
    "stem": "science, technology and engineering, from school to university, except pure mathematics",
    "code": "writing, explaining or correcting code, including code of a page or chart that an image shows",
    "knowledge": "facts about the world: people, places, works, history, species, products",
    "general_vqa": "questions about what an image shows: objects, attributes, relations, actions, reasons",
    "multi_image": "comparing or relating several images",
    "video": "describing or answering questions about a video",
    "conversation": "dialogue, writing and instructions that need no image",
}
OTHER = "other"
