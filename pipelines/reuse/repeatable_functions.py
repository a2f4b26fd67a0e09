"""Spark's built-in functions whose result depends on their arguments alone, by the names that plans print.

A function that is missing here is not trusted: it may depend on the clock, on randomness, on partitions or
on the user, or a user may have written it.
"""

_NAMES = """
    abs acos acosh add_months aes_decrypt aggregate any any_value approx_count_distinct
    approx_percentile array array_agg array_append array_compact array_contains array_distinct
    array_except array_insert array_intersect array_join array_max array_min array_position
    array_prepend array_remove array_repeat array_size array_sort array_union arrays_overlap arrays_zip
    arraytransform ascii asin asinh atan atan2 atanh atleastnnonnulls avg base64 between bigint bin
    binary bit_and bit_count bit_get bit_length bit_or bit_xor bitmap_bit_position bitmap_bucket_number
    bitmap_construct_agg bitmap_count bitmap_or_agg bool_and bool_or boolean bround btrim cardinality
    cast cbrt ceil ceiling char char_length character_length chr coalesce collect_list collect_set
    concat concat_ws contains conv convert_timezone corr cos cosh cot count count_if count_min_sketch
    covar_pop covar_samp crc32 csc cume_dist currentrow$ date date_add date_diff date_format
    date_from_unix_date date_part date_sub date_trunc dateadd datediff datepart day dayname dayofmonth
    dayofweek dayofyear decimal decode degrees dense_rank double e element_at elt encode endswith
    equal_null every exists exp explode explode_outer expm1 extract factorial filter find_in_set first
    first_value flatten float floor forall format_number format_string from_csv from_json from_unixtime
    from_utc_timestamp from_xml get get_json_object getarrayitem getbit getjsonobject getmapvalue
    gettimestamp greatest grouping grouping_id hash hex histogram_numeric hll_sketch_agg
    hll_sketch_estimate hll_union hll_union_agg hour hypot if ifnull ilike initcap inline inline_outer
    instr int is_valid_utf8 is_variant_null isnan isnotnull isnull json_array_length json_object_keys
    json_tuple kurtosis lag lambdafunction last last_day last_value lcase lead least left len length
    levenshtein like listagg ln locate log log10 log1p log2 lower lpad ltrim luhn_check make_date
    make_dt_interval make_interval make_timestamp make_timestamp_ltz make_timestamp_ntz make_valid_utf8
    make_ym_interval map map_concat map_contains_key map_entries map_filter map_from_arrays
    map_from_entries map_keys map_values map_zip_with mask max max_by md5 mean median min min_by minute
    mod mode month monthname months_between named_struct nanvl negative next_day none nth_value ntile
    nullif nullifzero nvl nvl2 octet_length overlay parse_json parse_url percent_rank percentile
    percentile_approx percentile_cont percentile_disc pi pivotfirst pmod posexplode posexplode_outer
    position positive pow power printf quarter radians rank reduce regexp regexp_count regexp_extract
    regexp_extract_all regexp_instr regexp_like regexp_replace regexp_substr regr_avgx regr_avgy
    regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy repeat replace reverse right
    rint rlike round row_number rpad rtrim schema_of_csv schema_of_json schema_of_variant
    schema_of_variant_agg schema_of_xml sec second sentences sequence sha sha1 sha2 shiftleft shiftright
    shiftrightunsigned sign signum sin sinh size skewness slice smallint some sort_array soundex space
    specifiedwindowframe split split_part sqrt stack startswith std stddev stddev_pop stddev_samp
    str_to_map string string_agg struct substr substring substring_index sum tan tanh timestamp
    timestamp_micros timestamp_millis timestamp_seconds timestampadd timestampdiff tinyint to_binary
    to_char to_csv to_date to_json to_number to_timestamp to_timestamp_ltz to_timestamp_ntz
    to_unix_timestamp to_utc_timestamp to_varchar to_variant_object to_xml transform transform_keys
    transform_values translate trim trunc try_add try_aes_decrypt try_avg try_cast try_divide
    try_element_at try_make_interval try_make_timestamp try_make_timestamp_ltz try_make_timestamp_ntz
    try_mod try_multiply try_parse_json try_parse_url try_subtract try_sum try_to_binary try_to_number
    try_to_timestamp try_url_decode try_validate_utf8 try_variant_get typeof ucase unbase64
    unboundedfollowing$ unboundedpreceding$ unhex unix_date unix_micros unix_millis unix_seconds
    unix_timestamp upper url_decode url_encode validate_utf8 var_pop var_samp varchar variance
    variant_explode variant_explode_outer variant_get weekday weekofyear width_bucket
    windowspecdefinition xpath xpath_boolean xpath_double xpath_float xpath_int xpath_long xpath_number
    xpath_short xpath_string xxhash64 year zeroifnull zip_with
"""
REPEATABLE_FUNCTIONS = frozenset(_NAMES.split())
