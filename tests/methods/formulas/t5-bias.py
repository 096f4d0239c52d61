"""S_i[t, s] + b_i[bucket(s − t)]."""

import math

from formula import Plain


class Formula(Plain):
    def bucket(self, distance):
        buckets, first = self.spec.position_buckets, 0
        if self.spec.bucket_sides == "both":
            buckets //= 2
            first = buckets if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(-distance, 0)
        single = buckets // 2
        if distance < single:
            return first + distance
        growth = math.log(distance / single) / math.log(self.spec.max_distance / single)
        return first + min(single + math.floor(growth * (buckets - single)), buckets - 1)

    def score(self, i, q, k, t, s):
        return super().score(i, q, k, t, s) + self.w["score_bias.weight"][i, self.bucket(s - t)]
