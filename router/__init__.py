"""Routes requests over SGLang workers: which worker serves this request, and are the workers well."""
